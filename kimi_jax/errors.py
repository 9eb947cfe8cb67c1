"""The one error that is written for the person at the terminal."""


class UserError(ValueError):
    """Something the user can mend. The message names it, says what is allowed and what
    to change; commands print it alone, without a traceback, and exit with code 1.
    """
