"""compute-sanitizer over all operators: memcheck, racecheck, synccheck, initcheck."""
