"""What `splitpoint doctor` looks at: one subject a file, each check a function of what it is given.

Checks change nothing. What they read of the machine they read below the folders of
`Places`, so that a test can hand them another machine.
"""
