"""The course's pictures: static, with units on the axes, the spread shown, and readable in a grey
print.

Every function draws on a given matplotlib `Axes` and returns it; one that needs room for many rows
makes the figure taller. Colours are never the only carrier of meaning: lanes and categories differ
in lightness and hatch as well. matplotlib is imported where it is used, so that importing this
package stays cheap.
"""

from labutils.course.plots.hardware import peaks, roofline
from labutils.course.plots.layout import use_style
from labutils.course.plots.memory import stacked_memory
from labutils.course.plots.palette import FILLS, INK, MEMORY_FILLS, MIST, NAVY, RUST
from labutils.course.plots.runs import frontier, ladder, sweep, utilisation
from labutils.course.plots.scores import MOST_OFF, calibration
from labutils.course.plots.series import curves, grouped, over_decoding, panels
from labutils.course.plots.traces import breakdown, timeline, typical
