"""Nightly jobs for a machine with eight MI355X, and for the reference engine in their place.

    jobs       which servers a job starts, in which order, and what it asks of them
    launch     the servers' flags and environment
    machine    what differs between the real machine and the reference engine
    steps      what is asked: reuse, restart, ``sglang-unified-kv check``, HiSparse's swap-in
    gsm8k      accuracy, through SGLang's own client
    benchmark  cost, through SGLang's own client
    rules      thresholds and their arithmetic
    server     a live server: its log, its client, programs that ask it
    run        runs a job
    verdict    table, JSON, exit code
    duration   how long a job is expected to take
    dry_run    what a job will do, and what ``doctor`` says of its launches
    main       the command line of ``scripts/nightly``

Nothing here imports SGLang before a job runs, so ``--dry-run`` prints its plan without it.
"""
