"""What an inference engine computes next, and in which state it is: pure planning, without torch.

A scheduler and a control plane are functions of the commands that they are given, in their order
and with their times; nothing here reads a clock, a random number or a socket.
"""
