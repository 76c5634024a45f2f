"""Three replicas of a service serve requests, and the one that leads reconciles. Again and again the leader is killed,
paused or cut off from the database. Then the histories are checked.

    python -m proof.succession --times 100
"""
