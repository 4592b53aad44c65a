"""Searches of training recipes that end early."""

from duplex.recognition import fit
from duplex.training.trials import Trial


def only_the_first(self: fit.FolderRecipes, began: float):
    """Levels of a search that trains nothing."""
    yield [Trial("nothing trained", self._spec(fit.NOTHING_TRAINED))]
