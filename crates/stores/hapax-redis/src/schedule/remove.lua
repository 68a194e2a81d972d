-- Removes an entry, if it exists.
--
-- KEYS     entries, order, queues
-- ARGV[1]  member
-- ARGV[2]  name of the keys of due entries, without the queue
--
-- Returns S and the member.
local member = ARGV[1]
local value, failed = call('HGET', KEYS[1], member)
if failed then
  return failed
end
if not value then
  return {'S', member}
end
-- The queue of a damaged entry is unknown: it is removed from every one.
local queues = {queue_of(value)}
if not queues[1] then
  queues, failed = call('ZRANGE', KEYS[3], 0, -1)
  if failed then
    return failed
  end
end
local writes = {}
for _, queue in ipairs(queues) do
  table.insert(writes, {'ZREM', ARGV[2] .. queue, member})
end
table.insert(writes, {'ZREM', KEYS[2], member})
table.insert(writes, {'HDEL', KEYS[1], member})
for _, write in ipairs(writes) do
  if write[1] == 'ZREM' then
    _, failed = call('ZCARD', write[2])
    if failed then
      return failed
    end
  end
end

for number, write in ipairs(writes) do
  value, failed = call(unpack(write))
  if failed and number > 1 then
    -- Servers reject the first write or none, unless the permissions are for some commands only.
    return redis.error_reply('PARTLY expected all keys of the entry to be removed, found a rejected command: allow ZREM and HDEL, then remove it again')
  elseif failed then
    return failed
  end
end
for _, queue in ipairs(queues) do
  if redis.pcall('ZCARD', ARGV[2] .. queue) == 0 then
    -- The name of an empty queue does no harm.
    redis.pcall('ZREM', KEYS[3], queue)
  end
end
return {'S', member}
