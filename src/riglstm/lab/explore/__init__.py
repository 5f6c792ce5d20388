"""`riglstm explore`: a local page on which one draws a digit and watches networks read it.

The page is in `page/`: written by hand, without a build step, and it loads nothing from elsewhere.
The server is the standard library's.
"""
