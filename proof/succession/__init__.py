"""Three replicas of a service, of which one at a time reconciles, and everyone serves requests; and a nemesis that
kills, stops or cuts off whichever leads, again and again. Then the histories are judged.

    python -m proof.succession --times 100
"""
