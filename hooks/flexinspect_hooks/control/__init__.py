"""Control of the capture process: the gate that the model passes, and the server in front of it."""
