"""A port for tests that start a coordinator."""

import socket


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]
