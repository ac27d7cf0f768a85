"""The door: bytes in, bytes out. Wire schemas, translation, SSE, routes and the command line."""
