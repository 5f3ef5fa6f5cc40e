"""The ensemble laboratory without torch: settings, stored results, scores and statistics."""
