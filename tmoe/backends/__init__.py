"""One file per provider. This is the list of them; each is imported when it is first considered."""

from ..registry import register

register("torch", "tmoe.backends.torch_backend:TorchBackend")
register("triton", "tmoe.backends.triton_backend:TritonBackend")
register("flashinfer_trtllm", "tmoe.backends.flashinfer.backend:trtllm")
register("flashinfer_cutlass", "tmoe.backends.flashinfer.backend:cutlass")
register("flashinfer", "tmoe.backends.flashinfer.operations:FlashInferOperations")
