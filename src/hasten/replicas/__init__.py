"""Several engines behind one endpoint, on Ray Serve: the extra `ray`.

routing.py says which replica serves a request, engine.py is what the HTTP API asks in the place of one engine,
replica.py one of those that answer, ray_serve.py and router.py are all that knows Ray (2.60: its
interface of routers is young).
"""
