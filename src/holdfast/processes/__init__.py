"""Users' code in processes that can be killed: a rank's pool, its fork server, and its workers."""
