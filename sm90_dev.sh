# Temporary: bits of the schedules touched, then the probe, then speed beside cuDNN and FA3 ($FA3: its folder). About 5 minutes.
LIMIT=110 timeout 150 python tune_sm90.py correct moves short joined many sched64 gqa small
timeout 40 python tune_sm90.py probe
LIMIT=75 timeout 100 python tune_sm90.py time 4096
LIMIT=75 timeout 100 python tune_sm90.py time 1024
LIMIT=90 timeout 120 python tune_sm90.py time 16384
