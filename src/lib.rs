//! Safe layer.
