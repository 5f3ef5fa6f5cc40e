"""What a trace's findings look like elsewhere: in a terminal, as JSON, SARIF and JUnit XML."""
