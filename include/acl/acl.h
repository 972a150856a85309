/*
 * Initialisation, versions and error texts of the ACL C interface (libascendcl).
 * Written for this project from the documented ABI; no vendor text.
 */
#ifndef ASCEND_ATTENTION_ACL_ACL_H_
#define ASCEND_ATTENTION_ACL_ACL_H_

#include "acl/acl_base.h"
#include "acl/acl_mdl.h"
#include "acl/acl_rt.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ACL_PKG_VERSION_MAX_SIZE 128
#define ACL_PKG_VERSION_PARTS_MAX_SIZE 64

/** Packages whose version aclsysGetCANNVersion tells. */
typedef enum aclCANNPackageName {
    ACL_PKG_NAME_CANN = 0,
    ACL_PKG_NAME_RUNTIME = 1,
    ACL_PKG_NAME_COMPILER = 2,
    ACL_PKG_NAME_HCCL = 3,
    ACL_PKG_NAME_TOOLKIT = 4,
    ACL_PKG_NAME_OPP = 5,
    ACL_PKG_NAME_OPP_KERNEL = 6,
    ACL_PKG_NAME_DRIVER = 7
} aclCANNPackageName;

/** The version of a package as NUL-terminated texts; 512 bytes. */
typedef struct aclCANNPackageVersion {
    char version[ACL_PKG_VERSION_MAX_SIZE];
    char majorVersion[ACL_PKG_VERSION_PARTS_MAX_SIZE];
    char minorVersion[ACL_PKG_VERSION_PARTS_MAX_SIZE];
    char releaseVersion[ACL_PKG_VERSION_PARTS_MAX_SIZE];
    char patchVersion[ACL_PKG_VERSION_PARTS_MAX_SIZE];
    char reserved[ACL_PKG_VERSION_MAX_SIZE];
} aclCANNPackageVersion;

/** Initialises the process; `configPath` may be null. A second call returns ACL_ERROR_REPEAT_INITIALIZE. */
aclError aclInit(const char *configPath);

/** Ends what aclInit began. */
aclError aclFinalize(void);

/** Gives up one reference of a counted initialisation and stores how many are left. Since a release after 8.1. */
aclError aclFinalizeReference(uint64_t *refCount);

/** Text of this thread's latest error, or null; owned by the library, valid until the thread's next error. */
const char *aclGetRecentErrMsg(void);

/** Name of the product, such as Ascend910B3, or null without a device. */
const char *aclrtGetSocName(void);

/** Version of the ACL interface (not of CANN). */
aclError aclrtGetVersion(int32_t *majorVersion, int32_t *minorVersion, int32_t *patchVersion);

/** Version of an installed package. */
aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion *version);

/** Version of the package named by a text, as text. Since a release after 8.1. */
aclError aclsysGetVersionStr(char *pkgName, char *versionStr);

/** Version of the package named by a text, as one number. Since a release after 8.1. */
aclError aclsysGetVersionNum(char *pkgName, int32_t *versionNum);

#ifdef __cplusplus
}
#endif

#endif
