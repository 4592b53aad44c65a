"""Searches of training recipes that end early."""

from __future__ import annotations

from duplex.fitting import folder_recipes
from duplex.library.recipe_search import Recipe


def only_the_first(self: folder_recipes.FolderRecipes, began: float):
    """Levels of a search that trains nothing."""
    yield [Recipe("nothing trained", self._spec(folder_recipes.NOTHING_TRAINED))]
