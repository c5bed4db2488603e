"""Many requests to one model: a batch whose rows join and leave, and a web service on it.

engine = mmspec.Engine(fast)               in Python
mmspec serve MODEL                         over HTTP; needs the extra `[serve]`
"""
