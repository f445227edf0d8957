"""One file per family that is not on transformers' experts interface.

Each class here is a subclass without state of the class that it stands in for: `replace_moe`
exchanges the class of the living module, so parameters, sub-modules, hooks and the state dict's
keys stay where they are. The name ends in the original's, which is what tools match on. Optional
attributes: ``parts``, sub-modules by name whose class must change with it; ``selects``, True where
the experts are chosen in it; ``why_not(self)``, which refuses an instance (before the change) with
a reason; ``weight_names``, the parameters of the two projections where the interface doesn't name
them; ``cannot_quantize``, why they can't be quantised.
"""
