"""The control plane of an inference engine over TCP: its sockets and its clock.

What is decided is decided in `megatron.scheduling.control`; every wait here has an end.
"""
