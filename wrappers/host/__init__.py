"""The host side that all families of kernels share: find and launch a kernel, keep memory, check arguments.

- machine: the architecture, SMs, streams, capture, kernels and plans as one object, which tests replace
- launch: key -> plan -> arguments -> launch, with the rules that every family but attention keeps there
- schema: torch operators from the fields of calls
- runtime: find a kernel in memory or a bundle, or compile it
- scratch: memory of partial results, counters, constants
- plain: decide which calls may go straight to a kernel
- overlap: refuse outputs that share memory with each other or with inputs
- scalars, checks: numbers, scales, shapes and dtypes of arguments
"""
