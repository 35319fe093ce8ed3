"""The lab: data, models, training and the command line around the library, which never imports it."""
