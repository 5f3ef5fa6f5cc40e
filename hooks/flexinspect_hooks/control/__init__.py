"""Control of the capture process: the step barrier in the model's loop, and the control server."""
