"""Real nodes, streams of clients, and a seeded nemesis that strikes in mid-answer.

::

    async with chaos_cluster(folder, names=("a", "b", "c")) as cluster:
        run = ChaosRun(cluster, seed=7)
        await run.prepare()
        await run.trial("kill stage")            # asserts every rule of ``history``

The client's gateway is the first node's, which is never killed: who loses the machine that holds the client loses the
stream.
"""
