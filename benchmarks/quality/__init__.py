"""Runs that take long: does a model of ours learn, and do the tasks measure it rightly?"""
