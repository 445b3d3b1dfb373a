"""A daemon of a version that never comes to serve, nor ends."""

import signal

signal.pause()
