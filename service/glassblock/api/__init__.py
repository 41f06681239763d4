"""The edge: HTTP in, HTTP out. It knows messages, errors and statuses, and no mathematics.

`routes.ROUTES` says what runs behind each endpoint, `answers.ANSWERS` which status each error
gets; both are complete, and a test says so. `entry` is the one door for the command line.
"""
