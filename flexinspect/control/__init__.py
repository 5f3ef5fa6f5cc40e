"""Commands to a running capture: the messages, the client, and the discovery of captures."""
