"""A real cluster: three PostgreSQL servers under Patroni and etcd, whose leader is taken away again and again.

``python -m proof.cluster --times 100`` starts the cluster and three worker processes, causes one fault after the other,
waits each time until the cluster is whole again, and then checks the histories. Everything runs on 127.0.0.1, on free
ports, and is removed at the end.

    worker ──→ proxy for clients ──→ PostgreSQL ←── proxy for peers ←── the other two servers
                                     Patroni    ←── proxy for REST  ←── the other two Patronis
                                        └──→ proxy for etcd ──→ etcd
"""
