"""`python -m deployments COMMAND`: the same as `templar COMMAND`."""

import sys

from deployments.command import main

sys.exit(main())
