"""Searches of training recipes that end early."""

from duplex.recognition.folder_fit import FolderFit
from duplex.training.recipes import RecipeChoice, search_recipes


def only_the_first(self: FolderFit) -> RecipeChoice:
    """A search that trains nothing."""
    return search_recipes([self.space.nothing_trained], None, self.trials.result, self.say)


def only_the_product(self: FolderFit) -> RecipeChoice:
    """A search that tries only the product of the closed form and two logistic regressions."""
    return search_recipes(self.space.untrained()[2:], None, self.trials.result, self.say)
