"""The control plane of an inference engine: how its ranks change state together.

A coordinator and its members are functions from a state and a message to a state and messages.
"""
