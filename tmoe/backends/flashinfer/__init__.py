"""What FlashInfer's kernels take: known without importing it.

signatures      what each release's entry points take
layouts         orders of rows and scales
layer           a layer's parts in these orders, checked and filled up
trtllm_weights, cutlass_weights     the weights by the entry points' keywords
operations_support, operations      router, quantisers, grouped GEMMs; group_layouts: their rows
"""
