"""The process driver: a daemon that runs sandboxes as local processes (`holdfast driver`).

    spec              PURE: the spec of a sandbox, and its description for clients
    store             the folder of a sandbox on disk
    supervisor        the parent process of a sandbox's program, which outlives the driver
    sandbox           one sandbox as last read, and its connection to the supervisor
    reconcile_folder  reconciles processes with the folders
    orphans           kills processes whose supervisor was killed
    events, logs      events for watchers; the output of sandboxes
    http, api         the HTTP server, and its routes
    daemon            locks the folder and listens; sandboxes keep running when it ends
    daemon_signals    signals and loopback addresses, also for the gateway

The daemon imports nothing else of holdfast, and only the standard library. Its client imports public names:

    client            `holdfast.reconciler.ProcessDriver`, on ``dial``, ``http_reply`` and ``driver_json``
"""
