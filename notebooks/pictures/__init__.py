"""Pictures for the notebooks.

    paper      the look: colours, figures, and how they are shown
    boxes      rows of boxes, tables, schedules, arrows
    charts     bars, lines, numbers on a line
    rows       drawings of slots, rows and tiles: where things lie
    products   drawings of matrix products and of the memory they take
    routing    drawings of tokens on their way to experts

The first three are tools for any picture; a drawing of the others is a whole figure that one
notebook shows: `pictures.show(pictures.sorted_slots(...), "what is to be seen")`.
"""

from .boxes import gantt, heat_map, table
from .charts import bar_pairs, bars, curves, lines, number_line, roofline, stacked_bars
from .paper import BLUE, INK, ORANGE, RED, SKY, colour_of, panels, show
from .products import backward_memory, three_products, tile_step
from .routing import exchange, groups, scores
from .rows import (
    blocks_of_places,
    earlier_slots,
    gate_and_up,
    grid_of_blocks,
    rows_to_tokens,
    sorted_slots,
    swizzle,
    tiles,
)

__all__ = [
    "BLUE", "INK", "ORANGE", "RED", "SKY", "backward_memory", "bar_pairs", "bars",
    "blocks_of_places", "colour_of", "curves", "earlier_slots", "exchange", "gantt", "gate_and_up",
    "grid_of_blocks", "groups", "heat_map", "lines", "number_line", "panels", "roofline",
    "rows_to_tokens", "scores", "show", "sorted_slots", "stacked_bars", "swizzle", "table",
    "three_products", "tile_step", "tiles",
]  # fmt: skip
