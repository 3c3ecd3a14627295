"""The beanstalkd protocol on a ``WorkQueue``: its parser, its commands and their replies, and the server."""
