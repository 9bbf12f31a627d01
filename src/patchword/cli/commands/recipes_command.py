"""`patchword recipes`: list the built-in recipes."""

from ..help_pages import fit
from ..model_args import JsonFlag
from ..output import print_json


def recipes(json: JsonFlag = False) -> int:
    """List the training recipes: what each one does, its command, and its result.

    Example: patchword recipes
    """
    from ...recipes import RECIPES, describe_recipe

    rows = {name: describe_recipe(name) for name in RECIPES}
    if json:
        print_json(rows)
        return 0
    for name, facts in rows.items():
        print(name)
        for title in ("summary", "command", "machine", "result"):
            if facts[title]:
                line = f"  {title:8} {facts[title]}"
                print(line if title == "command" else fit(line, indent=" " * 11))
        print()
    print("Your own recipe is a Python file that sets config: patchword train my_recipe.py")
    return 0
