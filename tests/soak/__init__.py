"""The soak: nodes that save and load for half an hour while faults of all kinds strike at random, and every answer is
judged. It holds the traffic, the faults and the judging; what makes nodes and servers is in `rig`.

    PYTHONPATH=tests .venv/bin/python -m soak --minutes 30 --seed 7 --json report.json
"""
