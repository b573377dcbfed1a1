/* A plugin as other programs load them: linked with the system's libibverbs. */
#include <infiniband/verbs.h>
#include <string.h>

int plugin_devices(void);

/* How many devices there are of the emulator. */
int plugin_devices(void) {
  int count = 0;
  int ours = 0;
  struct ibv_device** list = ibv_get_device_list(&count);
  for (int i = 0; i < count; i++) ours += strcmp(ibv_get_device_name(list[i]), "stagecoach0") == 0;
  ibv_free_device_list(list);
  return ours;
}
