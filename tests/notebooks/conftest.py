"""The notebooks' own modules are found as a notebook finds them: in its folder."""

import sys

from tests.notebooks.folder import NOTEBOOKS

sys.path.append(str(NOTEBOOKS))
