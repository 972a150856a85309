//! C exports.
