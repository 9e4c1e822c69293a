"""The kernels of this project in the simulator (ptxsim): small problems, results of earlier runs, coverage, mutants."""
