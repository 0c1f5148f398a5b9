# Temporary: bits of everything touched, then speed beside cuDNN and FA3 ($FA3: its folder), then the probe.
# Ends within 420 s; prints under 70 lines; all of it is in $OUT/sm90.log, the probe in $OUT/probe.log.
cd "$(dirname "$0")"
to=${OUT:-/tmp}
{
  LIMIT=95 timeout 110 python tune_sm90.py correct half tiles many joined moves short sched64 gqa small
  TIMES="${TIMES:-0.03 0.014 7}" LIMIT=255 timeout 270 python tune_sm90.py time
} 2>&1 | tee "$to/sm90.log"
timeout 35 python tune_sm90.py probe > "$to/probe.log" 2>&1
head -c 1500 "$to/probe.log"
