"""The process driver: a daemon that runs sandboxes as local processes (`holdfast driver`).

    spec        what a sandbox is to be, and what is said of one: pure
    store       a sandbox's folder on the disk
    supervisor  the process beside each sandbox, which outlives the driver
    runs        keeps what runs true to what is in the folders
    events      what has happened, for those who watch
    http, api   the way in
    daemon      one driver a folder; listens, and leaves the sandboxes running when it goes

The daemon knows nothing of the rest of holdfast, and needs the standard library alone. Its client is in the library:

    client      `holdfast.ProcessDriver`, over ``dial``, ``http_reply`` and ``driver_json``

``daemon_signals`` serves the gateway, too.
"""
