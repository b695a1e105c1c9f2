"""The scheduling core of the server: pure state machines, no I/O, no threads, no clock."""
