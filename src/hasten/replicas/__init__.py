"""Several engines behind one endpoint, on Ray Serve: the extra `ray`.

routing.py chooses the replica of a request; engine.py has the methods of one engine, over replicas, for the HTTP API;
replica.py is one replica. Only ray_serve.py and router.py know Ray (2.60: its interface of routers is alpha).
"""
