"""FlashInfer's kernels. What they take is known without importing it; only `installed` does.

Whole expert layers, by `backend`:
signatures      what each release's functions take
support         which function could run a layer, and why not
layouts         orders of rows and scales
layer           a layer's parts in these orders, checked and filled up
trtllm_weights, cutlass_weights     the weights by the functions' keywords; weight_parts: shared
calls           one call, by keyword

Single operations:
operations_support, operations      router, quantisers, grouped GEMMs; group_layouts: their rows
"""
