"""The beanstalkd server."""
