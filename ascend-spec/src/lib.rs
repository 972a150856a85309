//! The operators' contract.
