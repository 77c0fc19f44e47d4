"""``python -m perdure.cli`` is ``perdure``, for a Python whose scripts are not on the path."""

import sys

from perdure.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
