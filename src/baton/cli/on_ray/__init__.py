"""`baton up --on ray`: Ray places processes on nodes and replaces lost nodes; Baton routes, hands over and recovers.

    driver (baton up)              makes the placement group and the keepers, waits, drains at Ctrl-C
     `-- keeper, an actor each     runs `baton router` or `baton serve --role ROLE` as a process tree on its node

    bundles.py   what each keeper needs, and which of them no node can hold: plain functions
    keeper.py    the actor
    child.py     the first process of a keeper's tree: it dies with the keeper
    driver.py    the driver
    ray_api.py   all calls of Ray

Ray carries neither tokens nor health: instances find the router by a file that their keeper writes (`--router file:PATH`), and
the router sees lost instances within seconds, long before Ray does.
"""
